"""What a rank holds, from the start of forward to the optimizer's step."""
