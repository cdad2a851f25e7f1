"""The plan: everything a user decides before a run, its parts and rules, and how it is read."""

from zerofx.plan.parts import Offload as Offload
from zerofx.plan.parts import Precision as Precision
from zerofx.plan.plan import Plan as Plan
