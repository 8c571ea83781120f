// Ranks the messages of errors by the words that they share with one that is pasted whole: its
// names and numbers are on no page. A message is found by a part of it, too: by its statement, which
// is its title, or by words that follow each other in it. MESSAGES has title, address and text of
// each.
const rankErrors = (() => {
  const SHOWN = 3;
  const ENOUGH = 0.7; // of a text's words, or the message is none of it
  const LEAST = 4; // words shared
  const words = (text) => new Set(text.toLowerCase().match(/[a-z_]{2,}/g) ?? []);

  const score = (own, said) => {
    const shared = [...own].filter((word) => said.has(word)).length;
    return shared < Math.min(LEAST, own.size) || shared < ENOUGH * own.size
      ? 0
      : shared ** 2 / own.size;
  };

  let entries;
  return (message) => {
    entries ??= MESSAGES.map(([title, address, text]) => ({
      title,
      address,
      whole: text.toLowerCase(),
      texts: [words(title), words(text)].filter((own) => own.size >= LEAST),
    }));
    const said = words(message);
    const part = message.trim().toLowerCase();
    const quoted = ({ whole }) => (said.size >= LEAST && whole.includes(part) ? said.size : 0);
    const ranked = entries
      .map((entry) => ({
        ...entry,
        score: Math.max(quoted(entry), ...entry.texts.map((own) => score(own, said))),
      }))
      .filter((entry) => entry.score > 0)
      .sort((one, other) => other.score - one.score);
    return ranked.filter(({ score }) => score > ranked[0].score / 2).slice(0, SHOWN);
  };
})();
