"""Several prompts in one call, without a server: python examples/offline_batch.py [MODEL]

MODEL is a folder, a Hugging Face id such as openai/gpt-oss-20b, or demo (the small model in the package).
"""

from __future__ import annotations

import sys

from chorale import LLM, SamplingParams

QUESTIONS = ["What is 17 + 25?", "What is 812 - 345?", "Sort these numbers: 9, 3, 27, 1"]


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=400))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"{question}\n  {answer.outputs[0].text}")


if __name__ == "__main__":
    main()
