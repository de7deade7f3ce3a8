"""PyTorch's own strategies on a plain module, to compare with: what people run who use torch and no library on it.

`model` is the suite's GPT in torch.nn's modules, `weights` its start and its parameters by our names; `grid` the
device mesh, `tensor_parallel` and `data_parallel` what is done to the module, `pipeline` its stages, `update` the
optimizer step in every precision.  `engine` puts them together, and only an experiment that asks for it imports it.
"""
