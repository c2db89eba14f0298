"""Package metadata that depends on the repository's address: links of the README, and URLs of the project.

`VERL_TLT_REPOSITORY` is that address (https://host/owner/verl-tlt). Then links to files of the repository lead there.
Without it they become names: who reads a wheel or the built site (docs/hook.py) has no file to follow them to.
"""

import os
import re
from pathlib import Path

REPOSITORY = "VERL_TLT_REPOSITORY"


def linked(markdown: str, repository: str | None, prefix: str = "") -> str:
    """The text with its links to files of the repository made addresses, or names where there is none.

    Args:
        markdown: a page; a picture without an address is left out.
        repository: where the repository is.
        prefix: what links to files of the repository begin with; others stay as they are.
    """

    def lead(link: re.Match[str]) -> str:
        picture, label, path = link.groups()
        if repository:
            kind = "raw" if picture else "tree" if path.endswith("/") else "blob"
            return f"{picture}[{label}]({repository.rstrip('/')}/{kind}/main/{path})"
        if picture:
            return ""
        path = path.partition("#")[0]
        return f"`{path}`" if path.endswith(label.strip("`")) else f"{label}: `{path}`"

    return re.sub(rf"(!?)\[([^\]]*)\]\((?!\w+:|#){re.escape(prefix)}([^)\s]+)\)", lead, markdown)


if __name__ == "__main__":
    from setuptools import setup

    address = os.environ.get(REPOSITORY)
    setup(
        long_description=linked((Path(__file__).parent / "README.md").read_text(), address),
        long_description_content_type="text/markdown",
        project_urls={"Paper": "https://arxiv.org/abs/2511.16665"} | ({"Repository": address} if address else {}),
    )
