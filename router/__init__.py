"""Protocols and policy: Claude and OpenAI dialects over exchangeable backends."""
