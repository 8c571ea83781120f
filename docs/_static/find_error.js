// Leads from a message that is pasted to its explanation: on the pages of errors from a field of
// their own, on the page of the search from what was searched for.
(() => {
  const root = document.documentElement.dataset.content_root;
  const links = (message) =>
    rankErrors(message).map(({ title, address }) => {
      const [item, link] = [document.createElement("li"), document.createElement("a")];
      [link.href, link.textContent] = [new URL(root + address, location.href), title];
      item.append(link);
      return item;
    });

  const form = document.createElement("div");
  form.className = "find-error";
  const results = document.getElementById("search-results");
  if (results) {
    const found = links(new URLSearchParams(location.search).get("q") ?? "");
    if (!found.length) return;
    form.innerHTML = "<h2>Messages with these words</h2><ul></ul>";
    form.querySelector("ul").replaceChildren(...found);
    results.before(form);
    return;
  }

  form.innerHTML = `
    <label for="message">Paste a message</label>
    <textarea id="message" rows="3" spellcheck="false"></textarea>
    <ul aria-live="polite"></ul>`;
  document.querySelector("article h1").after(form);
  const [message, list] = [form.querySelector("textarea"), form.querySelector("ul")];
  message.addEventListener("input", () => {
    const found = links(message.value);
    const none = message.value.trim() ? ["No cause is listed for this message: it says what to do."] : [];
    list.replaceChildren(...(found.length ? found : none));
  });
})();
