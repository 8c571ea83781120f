// How the site's search ranks: as Sphinx does, but a heading that has the words in their
// order before pages that have them anywhere, a class of errors where it is explained, and
// what to do before why it is so and how it was measured.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (/^(design|benchmarks|conformance|tested|CONTRIBUTING)/.test(docname)) score -= 4;
    return kind === "title" ? score + (docname === "errors/index" ? 60 : 20) : score;
  },
  objNameMatch: 30,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
