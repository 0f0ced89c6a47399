"""A CUDA device without a GPU: the paths that only run on one, on any machine.

`tensors` has tensors that say they are on a device, `graphs` CUDA graphs that repeat what was captured,
`library` the operations that PyTorch has on CUDA alone, `cuda` the rest of `torch.cuda`, and `plugin` makes
pytest use them. Kernels run in Triton's interpreter.

It finds operands on the wrong device, waits between launch and collect, work that a graph does not repeat,
and memory that a graph uses after it was freed. It finds no races, limits of the hardware, or slowness: only
a GPU shows these.
"""
