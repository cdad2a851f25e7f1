"""Kubernetes manifests by the models of the clients' packages, and the recipe for mpirun."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
MODELS = {
    "Job": "V1Job",
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "PyTorchJob": "KubeflowOrgV1PyTorchJob",
    "Service": "V1Service",
}


def model(name: str) -> Any:
    """Return a model of the Kubernetes client's, or of the training operator's."""
    is_operators = name.startswith("Kubeflow")
    package = "kubeflow.training.models" if is_operators else "kubernetes.client.models"
    return getattr(importlib.import_module(package), name)


def check(value: Any, kind: str, where: str) -> None:
    """Check a value against a type of the models: every key is known, those required are there."""
    if found := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            check(item, found[1], f"{where}[{number}]")
    elif found := re.fullmatch(r"[dD]ict[(\[]str, ?(.+)[)\]]", kind):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check(item, found[1], f"{where}.{key}")
    elif kind in ("int", "bool", "str"):
        assert type(value).__name__ == kind, f"{where} = {value!r} is no {kind}"
    elif kind == "object":
        assert isinstance(value, (str, int)), where
    else:
        made = model(kind)
        assert isinstance(value, dict), where
        names = {key: name for name, key in made.attribute_map.items()}
        for key, item in value.items():
            assert key in names, f"{where} has no {key}"
            check(item, made.openapi_types[names[key]], f"{where}.{key}")
        made(**{names[key]: item for key, item in value.items()})  # raises if one is missing


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_manifests_are_of_their_kinds(path: Path) -> None:
    pytest.importorskip("kubernetes")
    if importlib.util.find_spec("kubeflow") is None:
        pytest.skip("needs the package kubeflow-training")
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        check(document, MODELS[document["kind"]], document["kind"])
    with pytest.raises(AssertionError, match=r"spec has no comand"):
        check({"spec": {"comand": []}}, "V1Pod", "Pod")
    with pytest.raises(ValueError, match="containers"):
        check({"spec": {"hostname": "a"}}, "V1Pod", "Pod")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_volumes_that_are_mounted_are_there(path: Path) -> None:
    text = path.read_text()
    for document in yaml.safe_load_all(text):
        spec = document["spec"]
        specs = spec.get("pytorchReplicaSpecs", {"": spec}).values()
        for pod in [each["template"]["spec"] for each in specs if "template" in each]:
            mounted = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["volumes"]}
            assert pod["terminationGracePeriodSeconds"] > 60


def test_the_recipe_for_mpirun_sets_torchruns_variables() -> None:
    page = (FOLDER.parents[1] / "docs" / "clusters.md").read_text()
    (script,) = re.findall(r"bash -c '(.+?)exec python", page, re.S)
    wanted = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"  # as Open MPI calls them
    given = {f"OMPI_COMM_WORLD_{n}": v for n, v in zip(names, wanted.values(), strict=True)}
    done = subprocess.run(
        ["bash", "-c", script + "env"], env={**os.environ, **given}, text=True, check=True,
        stdout=subprocess.PIPE, timeout=20,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert {f"{name}={value}" for name, value in wanted.items()} <= set(lines)
