"""A batch in other forms than DataProto.

folder.py      a folder of safetensors and JSON
tensordict.py  one TensorDict
"""
