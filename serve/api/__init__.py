"""The HTTP side of the server, in vLLM's and OpenAI's shapes. Knows the engine by `serve.async_engine` alone."""
