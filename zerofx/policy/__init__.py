"""Memory policies: each decision that the runtime makes and the planner predicts, written once.

The functions here take sizes, formats, buckets and the layout; they need neither tensors nor ranks.
The runtime calls them while it trains, and the analyses call them while they walk through a
program. Callers import the modules, not their functions: a test that replaces a policy then
replaces it for both.
"""
