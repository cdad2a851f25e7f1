"""Every private name of torch that zerofx uses, with the reason; one module per subject.

It works with torch 2.11 to 2.13. No other module uses such a name. Each name has a contract in
tests/compat/test_compat_contracts.py, which states what zerofx relies on.
"""
