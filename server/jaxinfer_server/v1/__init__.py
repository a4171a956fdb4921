"""Version 1 of the wire: code generated from `server/protos/jaxinfer/v1/inference.proto` (`make proto`)."""
