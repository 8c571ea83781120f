// On the page of errors: finds the explanation of a message that is pasted whole. Its names
// and numbers are not on the pages, so entries are ranked by the words that they share.
(() => {
  const SHOWN = 3;
  const ENOUGH = 0.7; // of an entry's words, or the message is none of it
  const words = (text) => new Set(text.toLowerCase().match(/[a-z_]{2,}/g) ?? []);

  let entries;
  const load = async () => {
    const links = document.querySelectorAll("article p a.reference.internal");
    const pages = [...new Set([...links].map((link) => link.href.split("#")[0]))];
    const near = pages.filter((page) => new URL(".", page).href === new URL(".", location).href);
    const read = async (page) => {
      const text = await (await fetch(page)).text();
      const body = new DOMParser().parseFromString(text, "text/html");
      const entry = (heading) => ({
        title: heading.textContent.replace(/[#¶]$/, ""),
        address: `${page}#${heading.parentElement.id}`,
        words: words(heading.parentElement.querySelector("p code").textContent),
      });
      return [...body.querySelectorAll("article h3")].map(entry);
    };
    return (await Promise.all(near.map(read))).flat();
  };

  const find = async (message) => {
    entries ??= load();
    const said = words(message);
    const ranked = (await entries).map((entry) => {
      const shared = [...entry.words].filter((word) => said.has(word)).length;
      return { ...entry, part: shared / entry.words.size, score: shared ** 2 / entry.words.size };
    });
    const likely = ranked.filter(({ part }) => part >= ENOUGH);
    return likely.sort((one, other) => other.score - one.score).slice(0, SHOWN);
  };

  const form = document.createElement("div");
  form.className = "find-error";
  form.innerHTML = `
    <label for="message">Paste a message</label>
    <textarea id="message" rows="3" spellcheck="false"></textarea>
    <ul aria-live="polite"></ul>`;
  document.querySelector("article h1").after(form);
  const [message, found] = [form.querySelector("textarea"), form.querySelector("ul")];
  message.addEventListener("input", async () => {
    const text = message.value;
    const likely = await find(text);
    if (text !== message.value) return; // more has been typed since
    const none = "No message has these words.";
    found.replaceChildren(
      ...likely.map(({ title, address }) => {
        const [item, link] = [document.createElement("li"), document.createElement("a")];
        [link.href, link.textContent] = [address, title];
        item.append(link);
        return item;
      }),
      ...(likely.length || !text.trim() ? [] : [none]),
    );
  });
})();
