"""CUDA graphs: forwards and backwards recorded once and replayed in the same memory."""
