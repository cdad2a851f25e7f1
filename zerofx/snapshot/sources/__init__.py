"""Sources of weights and optimizer states: the formats of other libraries, each of them streamed.

recognise.py      the format of the files at a path
source.py         an open checkpoint and its tensors
tensor_files.py   safetensors
torch_files.py    torch.save
zero_files.py     DeepSpeed: ZeRO and universal
chunk_files.py    torch.distributed.checkpoint: folders of FSDP2 and Megatron
"""
