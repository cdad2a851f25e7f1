"""transformers' Trainer on zerofx: one trains, evaluates and saves; a second one resumes.

$ torchrun --standalone --nproc-per-node 2 examples/trainer.py
step 10  loss 5.0
step 20  loss 4.1
evaluation 4.0, of 2 ranks at stage 3
resumed at step 10, step 20  loss 4.1
"""

import tempfile

import torch
import transformers
from torch.utils.data import Dataset

from zerofx.integrations.transformers import Trainer, TrainingArguments

FOLDER = f"{tempfile.gettempdir()}/zerofx-example-trainer"


class Counting(Dataset):
    """Rows of consecutive numbers with different starting points."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = (torch.arange(32) + 37 * index) % 256
        return {"input_ids": tokens, "labels": tokens}


def trainer():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=FOLDER, plan={"stage": 3, "kernels": "aten"}, max_steps=20, learning_rate=2e-3,
        gradient_accumulation_steps=2, logging_steps=10, save_steps=10, report_to="none",
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    made = Trainer(model, arguments, train_dataset=Counting(), eval_dataset=Counting())
    made.remove_callback(transformers.PrinterCallback)
    return made


first = trainer()
first.train()
found = first.evaluate()["eval_loss"]
again = trainer()
again.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-10")
if first.is_world_process_zero():
    for entry in first.state.log_history[:2]:
        print(f"step {entry['step']}  loss {entry['loss']:.1f}")
    print(f"evaluation {found:.1f}, of {first.args.world_size} ranks at stage {first.plan.stage}")
    print(f"resumed at step 10, step 20  loss {again.state.log_history[1]['loss']:.1f}")
