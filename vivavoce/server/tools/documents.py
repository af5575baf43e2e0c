"""A tool that finds passages in the operator's files."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vivavoce.server.tools.interface import BuiltInTool, CallingSession, object_schema, text_argument
from vivavoce.server.tools.passages import PassageIndex, TextEmbedder, read_passages

MAX_QUERY = 500
NOTHING = "Nothing in the documents fits these words. Try others, or say that you do not know."


def documents(paths: Sequence[Path], embedder: TextEmbedder | None = None) -> BuiltInTool:
    """The tool `search_documents`. The files are read, and embedded where there is a model for it, now."""
    index = PassageIndex([passage for path in paths for passage in read_passages(path)], embedder)
    what = "Key words of the question" if embedder is None else "The question"
    described = f"{what}, in the language of the documents."
    schema = object_schema({"query": {"type": "string", "description": described}}, "query")

    async def run(arguments: Mapping[str, Any], session: CallingSession) -> str:
        query = text_argument(arguments, "query", MAX_QUERY)
        found = await asyncio.to_thread(index.search, query)
        return "\n\n".join(f"[{passage.file}]\n{passage.text}" for passage in found) or NOTHING

    description = "Finds passages in the documents. Use it for questions that they may answer, and answer from them."
    return BuiltInTool("search_documents", description, schema, run)
