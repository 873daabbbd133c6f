"""Search tool over a local index, without any server.

Results and arguments are those of the search tool that verl has: a list of queries and topk in, numbered passages
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.agents.tools.search_index import Passage, SearchIndex, build_index
from strop.agents.tools.threads import answer_in_thread

MAX_QUERIES, MAX_TOPK = 8, 50
"""Most queries of a call, and passages of each."""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the corpus for passages.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array", "items": {"type": "string"}, "description": "What to search for, a query each.",
                }
            },
            "required": ["query_list"],
        },
    },
}  # fmt: skip


class SearchTool(BaseTool):
    """Search in a local index.

    config: `index`, the file; `corpus` builds it at first use where it is missing; `topk`, passages per query (3).
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        known_keys = {"type", "index", "corpus", "topk"}
        if unknown := set(self.config) - known_keys:
            raise ValueError(
                f"config has the unknown key {sorted(unknown)[0]!r}; a search tool has index, corpus and topk"
            )
        if not self.config.get("index"):
            raise ValueError("config has no index; name the file that `strop data index` made")
        index, corpus = Path(str(self.config["index"])).expanduser(), self.config.get("corpus")
        if not index.is_file() and corpus:
            build_index(Path(str(corpus)).expanduser(), index, only_if_missing=True)
        self._index = SearchIndex(index)
        self._topk = int(self.config.get("topk", 3))
        if not 1 <= self._topk <= MAX_TOPK:
            raise ValueError(f"topk is {self._topk}; use 1 to {MAX_TOPK}")

    def wrong_arguments(self, arguments: Mapping[str, Any]) -> str:
        """As of BaseTool; it takes `query` and `topk` as well, without showing them."""
        shown_arguments = {key: value for key, value in arguments.items() if key not in ("query", "topk")}
        if isinstance(query := arguments.get("query"), str):
            shown_arguments.setdefault("query_list", [query])
        return super().wrong_arguments(shown_arguments)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool; one query may be given as `query`, and `topk` lowers or raises the number of passages."""
        queries = parameters.get("query_list", parameters.get("query"))
        queries = [queries] if isinstance(queries, str) else queries
        if (
            not isinstance(queries, list)
            or not queries
            or not all(isinstance(query, str) for query in queries)
        ):
            return ToolResponse(text='Error: give "query_list", a list of texts.'), 0.0, {"num_passages": 0}
        topk = parameters.get("topk", self._topk)
        topk = min(max(topk, 1), MAX_TOPK) if isinstance(topk, int) else self._topk
        results = [await answer_in_thread(self._index.search, query, topk) for query in queries[:MAX_QUERIES]]
        text = "\n---\n".join(passages_text(passages) for passages in results)
        if len(queries) > MAX_QUERIES:
            text += f"\n(only the first {MAX_QUERIES} queries were searched for)"
        return ToolResponse(text=text), 0.0, {"num_passages": sum(map(len, results))}


def passages_text(passages: Sequence[Passage]) -> str:
    """Passages as text, numbered from 1."""
    if not passages:
        return "No passage found."
    return "\n".join(
        f"Doc {number} (Title: {passage.title})\n{passage.text}"
        if passage.title
        else f"Doc {number}\n{passage.text}"
        for number, passage in enumerate(passages, start=1)
    )
