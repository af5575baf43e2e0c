"""TensorRT-LLM: checkpoint folders, the script that builds their engines, and a runner."""
