"""What weights and optimizer states are read from: the formats of others, each streamed.

recognise.py      what lies at a path
source.py         a checkpoint that is open, and its tensors
tensor_files.py   safetensors
torch_files.py    torch.save
zero_files.py     DeepSpeed: ZeRO, and universal
chunk_files.py    torch.distributed.checkpoint: FSDP2's folders, and Megatron's
"""
