"""A hook of mkdocs: it makes diagrams scroll, and adds Mermaid to the site. Without `globalThis.mermaid`, mkdocs-material would
load Mermaid from unpkg.com."""

import base64
import hashlib
import io
import logging
import os
import re
import tarfile
import urllib.request
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

URL = "https://registry.npmjs.org/@mermaid-js/tiny/-/tiny-11.17.2.tgz"
SHA512 = "PmFr1c5cSfNf5AngLLR98DrbvR4U5KeD7I+hQkGqG5w5Veu3QT4dG0qu9f99cpn/sKj2XxRBK0q7EL6hr9NY/A=="  # npm's "integrity"
SCRIPT = "javascripts/mermaid.js"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add Mermaid to the site and to its pages. Its package is fetched once and kept in the user's cache folder."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrl" / URL.rpartition("/")[2]
    package = cached.read_bytes() if cached.is_file() else b""
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != SHA512:
        try:
            with urllib.request.urlopen(URL, timeout=20.0) as reply:
                package = reply.read()
        except OSError as error:
            logging.getLogger("mkdocs").info(f"cannot fetch {URL} ({error}): browsers load Mermaid from unpkg.com")
            return
        if base64.b64encode(hashlib.sha512(package).digest()).decode() != SHA512:
            raise PluginError(f"{URL} does not have the SHA-512 in launcher/site_mermaid.py; it is not used")
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(package)
    with tarfile.open(fileobj=io.BytesIO(package)) as members:
        script = members.extractfile("package/dist/mermaid.tiny.js").read()
    files.append(File.generated(config, SCRIPT, content=script))
    config.extra_javascript.append(SCRIPT)


def on_page_content(html: str, **_: object) -> str:
    """Put each diagram into a box that scrolls (docs/stylesheets/site.css)."""
    return re.sub(r'(<pre class="mermaid">.*?</pre>)', r'<div class="diagram">\1</div>', html, flags=re.DOTALL)
