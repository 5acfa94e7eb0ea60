"""What a fake engine refuses, as vLLM does: bodies that are no request, and prompts longer than the model's window."""

from __future__ import annotations

from typing import Any

import orjson


def read_body(body: bytes, max_model_len: int) -> dict[str, Any] | str:
    """The request, or why it is answered with 400."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return f"JSON decode error: {error}"
    n = content.get("max_tokens", 16)
    if n is not None and (not isinstance(n, int) or n < 1):
        return f"max_tokens must be at least 1, got {n!r}"
    prompt = content.get("prompt")
    if isinstance(prompt, list) and len(prompt) + (n or 1) > max_model_len:
        return f"This model's maximum context length is {max_model_len} tokens, and the prompt has {len(prompt)}"
    return dict(content)


def refusal(message: str) -> bytes:
    """The body of the answer, in OpenAI's form."""
    return orjson.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})
