"""Fields of OpenAI's API and of other servers that would change a reply, and cannot be had here.

They are declared only to be refused, each with what serves in its place; null is the same as
leaving one out, and so is the value that names what is done anyway.

Sources: OpenAI's API reference; the references of vLLM, SGLang, llama.cpp's server and Text
Generation Inference for requests of the same paths.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

_PREFIX = "Not served; "


def unserved(instead: str = "leave it out") -> Any:
    """Declare a field that is refused, with a hint at what serves in its place."""
    return Field(None, description=f"{_PREFIX}{instead}.")


def hints_of(*kinds: type[BaseModel]) -> dict[str, str]:
    """Return the hints of all fields that models refuse."""
    return {
        name: item.description.removeprefix(_PREFIX).removesuffix(".")
        for kind in kinds
        for name, item in kind.model_fields.items()
        if item.description and item.description.startswith(_PREFIX)
    }


class UnservedFields(BaseModel):
    """What chat and text completions refuse alike."""

    # What the reply must look like.
    guided_json: None = unserved("use response_format")
    guided_choice: None = unserved("use guided_regex")
    guided_grammar: None = unserved("use guided_regex")
    structured_outputs: None = unserved("use response_format or guided_regex")
    grammar: None = unserved("use response_format or guided_regex")
    ebnf: None = unserved("use response_format or guided_regex")
    json_schema: None = unserved("use response_format")
    regex: None = unserved("use guided_regex")
    # How long it may be, and what of it is given.
    n_predict: None = unserved("use max_tokens")
    num_predict: None = unserved("use max_tokens")
    max_new_tokens: None = unserved("use max_tokens")
    min_new_tokens: None = unserved("use min_tokens")
    truncate_prompt_tokens: None = unserved()
    prompt_logprobs: None = unserved("use logprobs")
    include_stop_str_in_output: Literal[False] | None = unserved()
    skip_special_tokens: Literal[True] | None = unserved()
    return_tokens_as_token_ids: Literal[False] | None = unserved()
    # How tokens are chosen.
    use_beam_search: Literal[False] | None = unserved()
    length_penalty: None = unserved()
    allowed_token_ids: None = unserved("use logit_bias")
    logits_processors: None = unserved("use logit_bias")
    repeat_penalty: None = unserved("use repetition_penalty")
    no_repeat_ngram_size: None = unserved("use repetition_penalty")
    typical_p: None = unserved("use top_p or min_p")
    top_a: None = unserved("use top_p or min_p")
    mirostat: None = unserved("use top_p or min_p")
    do_sample: None = unserved("use temperature, 0 for greedy decoding")
    # What the model is shown.
    add_special_tokens: None = unserved()
    chat_template: None = unserved("the model's own is used")
    add_generation_prompt: Literal[True] | None = unserved()
    continue_final_message: Literal[False] | None = unserved()
    documents: None = unserved("use chat_template_kwargs")
    enable_thinking: None = unserved("use chat_template_kwargs")
