"""The same prompts through other engines, each in a file with a row in `registry.py`.

interface          what a bench asks of a peer, and the counterparts of our drafters
hf_transformers    `generate` of transformers, plain and assisted
openvino_pipeline  OpenVINO GenAI; openvino_model writes the checkpoint as its graph
llama_cpp          llama.cpp; gguf_file writes the checkpoint as its file
vllm_peer          vLLM, which vllm_program runs in an interpreter of its own
registry           the peers by name, what they need and cannot do, and their processes
"""
