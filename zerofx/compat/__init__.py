"""Every private name of torch that zerofx uses, with the reason, one module per subject.

Works on torch 2.11 to 2.13. No other module reaches such a name, and each has a contract in
tests/compat/test_compat_contracts.py that says what zerofx relies on.
"""
