"""Files that run in SGLang's own environment: started by path, they import nothing of strop but its digest.

launch.py         starts SGLang's server with arguments from its standard input, and ends with its owner
strop_loader.py   what each of SGLang's workers imports: weights out of shared memory
"""
