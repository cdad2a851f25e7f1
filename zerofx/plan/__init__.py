"""What a user decides before a run: the plan, its parts and rules, and how fields are read."""

from zerofx.plan.parts import Offload as Offload
from zerofx.plan.parts import Precision as Precision
from zerofx.plan.plan import Plan as Plan
