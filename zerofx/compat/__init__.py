"""Every private torch API that zerofx uses, a file for each who needs it, with the reason why.

Works on torch 2.11 to 2.13; nothing else in the package imports a name of torch that begins with
an underscore.
"""
