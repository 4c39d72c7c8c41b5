"""A page in headless Chromium, where one is found: what its script made of it, and what it complained of."""

import html
import json
import re
import shutil
import subprocess
import tempfile


def chromium():
    """The program, or None: then tests in a browser are skipped, and say so."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    return None


def in_browser(page, script, folder, width=1280):
    """Returns the value of `script`, a function's body that runs behind the page's own, and the lines of the console.

    The page is tried without network: a request that it makes fails, and shows on the console."""
    tail = f"""<script>addEventListener("load", () => {{
      let said;
      try {{ said = (() => {{ {script} }})(); }} catch (error) {{ said = {{ error: String(error) }}; }}
      const out = document.createElement("pre");
      out.id = "said";
      out.textContent = JSON.stringify(said);
      document.body.append(out);
    }});</script>"""
    tried = f"{folder}/in-browser.html"
    with open(tried, "w", encoding="utf-8") as f:
        f.write(page + tail)
    with tempfile.TemporaryDirectory(dir=folder) as profile:
        done = subprocess.run([chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                               "--disable-background-networking", "--proxy-server=127.0.0.1:9", "--dump-dom",
                               f"--user-data-dir={profile}", f"--window-size={width},900", f"file://{tried}"],
                              capture_output=True, text=True, timeout=100)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.S)
    if not found:
        raise AssertionError(f"the page has not come to its end:\n{done.stderr[-2000:]}")
    return json.loads(html.unescape(found.group(1))), console
