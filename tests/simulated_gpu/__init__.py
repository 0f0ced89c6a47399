"""Simulates a CUDA device, so that code paths for CUDA run on any machine.

`tensors` has tensors that report a CUDA device, `graphs` has CUDA graphs that repeat captured operations,
`library` has the operations that PyTorch only has on CUDA, `cuda` has the rest of `torch.cuda`, and `plugin`
makes pytest use them. Kernels run in Triton's interpreter.

It finds operands on the wrong device, waits between launch and collect, work that a graph does not repeat,
and memory that a graph uses after it was freed. It does not find races, hardware limits or slowness: these
need a GPU.
"""
