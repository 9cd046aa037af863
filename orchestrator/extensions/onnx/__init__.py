"""Export of an encoder as an ONNX model, for onnxruntime and others."""
