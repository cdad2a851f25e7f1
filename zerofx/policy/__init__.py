"""Each decision that the runtime makes about memory and the planner predicts, made once for both.

Everything here takes sizes, formats, buckets and the layout, and needs neither tensors nor ranks:
the runtime asks while it trains, the analyses ask while they walk through a program. Callers import
the modules and not their functions, so that a policy that is replaced is replaced for both.
"""
