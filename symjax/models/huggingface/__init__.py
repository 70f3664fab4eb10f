"""Weights from and for models of Hugging Face and of unilm.

folders.py     read_folder: a folder → a model; as_family: a model → its files
llama.py gpt2.py rope.py  config.json and tensor names of Llama, DiffLlama and GPT-2
weights.py     single layers: unilm's Diff Transformer, DiffLlama
files.py       safetensors files, JSON, and checks of both
"""
