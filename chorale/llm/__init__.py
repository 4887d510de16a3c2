"""LLM: offline inference with vLLM's API. The calling thread steps the engine; turns run the server's code.

from chorale import LLM, SamplingParams

with LLM(model="demo") as llm:
    print(llm.chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)
"""

from chorale.llm.llm import LLM
from chorale.llm.lora import LoRARequest
from chorale.llm.outputs import CompletionOutput, Logprob, RequestOutput, ToolCall
from chorale.llm.params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "ToolCall",
]
