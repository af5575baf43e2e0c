"""TensorRT-LLM checkpoint folders, the script that builds their engines, and what runs them."""
