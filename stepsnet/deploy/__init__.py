"""Models as files for other runtimes: ONNX, OpenVINO's IR and torch.export's archive, and sessions that run them."""
