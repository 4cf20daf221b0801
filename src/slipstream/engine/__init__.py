"""The engine: requests in, verified tokens out, one forward a step."""
