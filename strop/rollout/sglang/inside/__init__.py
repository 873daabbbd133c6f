"""What runs in SGLang's own environment: plain files, started by path, that import nothing of strop but its digest.

launch.py         starts SGLang's server with arguments from its standard input, and ends with its owner
strop_loader.py   what each of SGLang's workers imports: weights out of shared memory
"""
