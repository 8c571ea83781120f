// Leads from a message that is pasted to its explanation: on the pages of errors from a field of
// their own, on the page of the search from what was searched for.
(() => {
  const SAME = "The cause of this message";
  const NEAR = "Messages with these words";
  const NONE = "No cause is listed for this message: it says what to do.";
  const IS_MESSAGE = /(Error|Warning): .*\w+ .*\w+ /;
  const root = document.documentElement.dataset.content_root;
  const toLink = ({ title, address }) => {
    const [item, link] = [document.createElement("li"), document.createElement("a")];
    [link.href, link.textContent] = [new URL(root + address, location.href), title];
    item.append(link);
    return item;
  };

  const form = document.createElement("div");
  form.className = "find-error";
  const results = document.getElementById("search-results");
  if (results) {
    const query = new URLSearchParams(location.search).get("q") ?? "";
    const found = rankErrors(query);
    if (!found.length && !IS_MESSAGE.test(query)) return;
    form.innerHTML = found.length
      ? `<h2>${found[0].isSame ? SAME : NEAR}</h2><ul></ul>`
      : `<p>${NONE}</p>`;
    form.querySelector("ul")?.replaceChildren(...found.map(toLink));
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
    const found = rankErrors(message.value).map(toLink);
    const none = message.value.trim() ? [NONE] : [];
    list.replaceChildren(...(found.length ? found : none));
  });
})();
