"""An agent that must look something up before it answers.

    python examples/agent_with_tool.py
    python examples/agent_with_tool.py "How many roses are there?"

The first turn is held to a tool call by a grammar: even a model of 135 million parameters writes one that is valid.
Larger models decide for themselves: then leave ``tool_choice`` out, or use ``langchain.agents.create_agent``.

Needs: pip install 'paged-backend[langchain]'
"""

from __future__ import annotations

import sys

# first: if LangChain is missing, it says what to install
from paged_backend.adapters.langchain import ChatPaged

# isort: split
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from lexical import Passages

PASSAGES = Passages()


@tool(parse_docstring=True)
def search_garden(question: str) -> str:
    """Find what is known about the botanical garden.

    Args:
        question: what to look for, in a few words
    """
    return PASSAGES.texts[PASSAGES.best(question, 1)[0]]


def main() -> None:
    question = " ".join(sys.argv[1:]) or "When did the Orchid House open?"
    model = ChatPaged(model="demo", temperature=0, max_tokens=80)
    messages = [SystemMessage("You answer questions about a botanical garden."), HumanMessage(question)]

    call_model = model.bind_tools([search_garden], tool_choice="any")
    for turn in range(4):
        reply: AIMessage = (call_model if turn == 0 else model).invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            print(f"calls {call['name']}({call['args']})")
            result = search_garden.invoke(call)
            print(f"finds {result.content!r}")
            messages.append(result)
    print(f"answers {messages[-1].content!r}")


if __name__ == "__main__":
    main()
