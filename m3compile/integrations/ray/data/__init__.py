"""Embedding folders of images with Ray Data, in any number of processes and machines.

`run.embed` is the job; `cli/embed.py` its command. Importing this package imports neither Ray nor
torch.
"""
