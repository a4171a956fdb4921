"""The engine: parameters, page pool and step functions on the device; plans in, tokens out. It holds no policy."""
