// Ranks the messages of errors by what they share with one that is pasted whole: its names and numbers
// are on no page. MESSAGES has title, address and text of each, in which … stands for a name or a
// number. A message is the one whose parts between these follow each other in what was pasted, or else
// the one with most of its words; a part of a message finds it, too.
const rankErrors = (() => {
  const SHOWN = 3;
  const ENOUGH = 0.7; // of a text's words, or the message is none of it
  const LEAST = 4; // words shared
  const LETTERS = 12; // of parts that follow each other, or they may be anywhere
  const words = (text) => new Set(text.toLowerCase().match(/[a-z_]{2,}/g) ?? []);
  const plain = (text) => text.toLowerCase().replace(/\s+/g, " ").trim();
  const partsOf = (text) =>
    text.split("…").map((part) => plain(part).replace(/^[^\w'-]+|[^\w'-]+$/g, "")).filter(Boolean);

  const isInWord = (text, at) => /\w\w/.test(text.slice(Math.max(at - 1, 0), at + 1)) && at > 0;
  const find = (part, message, from) => {
    for (let at = message.indexOf(part, from); at >= 0; at = message.indexOf(part, at + 1))
      if (!isInWord(message, at) && !isInWord(message, at + part.length)) return at;
    return -1;
  };
  // A word of parts in order counts twice: a text with the same words in another order is behind.
  const scoreParts = (parts, message) => {
    let [from, letters] = [0, 0];
    for (const part of parts) {
      const at = find(part, message, from);
      if (at < 0) return 0;
      from = at + part.length;
      letters += part.length;
    }
    return letters < LETTERS ? 0 : 2 * parts.join(" ").split(" ").length;
  };
  const scoreWords = (own, said) => {
    const shared = [...own].filter((word) => said.has(word)).length;
    return shared < Math.min(LEAST, own.size) || shared < ENOUGH * own.size
      ? 0
      : shared ** 2 / own.size;
  };

  let entries;
  return (pasted) => {
    entries ??= MESSAGES.map(([title, address, text, heading]) => ({
      title,
      address,
      whole: plain(text),
      parts: [text, heading].map(partsOf),
      texts: [text, heading].map(words).filter((own) => own.size >= LEAST),
    }));
    const [said, message] = [words(pasted), plain(pasted)];
    const ranked = entries
      .map((entry) => {
        const inOrder = Math.max(...entry.parts.map((parts) => scoreParts(parts, message)));
        const quoted = said.size >= LEAST && entry.whole.includes(message) ? said.size : 0;
        const shared = Math.max(0, ...entry.texts.map((own) => scoreWords(own, said)));
        return { ...entry, isSame: inOrder + quoted > 0, score: Math.max(inOrder, quoted, shared) };
      })
      .filter((entry) => entry.score > 0)
      .sort((one, other) => other.score - one.score);
    const isFirst = ({ address }, place) =>
      ranked.findIndex((other) => other.address === address) === place;
    return ranked
      .filter((entry, place) => entry.score > ranked[0].score / 2 && isFirst(entry, place))
      .slice(0, SHOWN);
  };
})();
