// A button that copies the commands or the code of a block, without the prompts of Python's.
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // a page without https has none
  for (const block of document.querySelectorAll(".highlight > pre")) {
    if (block.closest(".highlight-text, .highlight-none")) continue; // what was printed
    const button = Object.assign(document.createElement("button"), { className: "copy", type: "button", textContent: "Copy" });
    button.addEventListener("click", async () => {
      let lines = block.textContent.trimEnd().split("\n");
      if (lines[0].startsWith(">>> ")) lines = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line)).map((line) => line.slice(4));
      await navigator.clipboard.writeText(lines.join("\n"));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    block.parentElement.append(button);
  }
});
