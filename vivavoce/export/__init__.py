"""Models for other runtimes: ONNX graphs and TensorRT-LLM checkpoints."""
