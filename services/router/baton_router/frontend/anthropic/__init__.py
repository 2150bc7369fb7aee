"""Anthropic's Messages, over the pipeline of chats."""
