// Each section is built separately: if the data of a run break one of them, the others are still shown.
for (const [id, build] of [["headline", buildHeadline], ["curves", buildCurves], ["evaluation", buildEvaluation],
  ["samples", buildSamples], ["config", buildConfig], ["environment", buildEnvironment]]) {
  const section = document.getElementById(id);
  try {
    build(section);
  } catch (error) {
    console.error(error);
    section.append(el("p", { class: "note" }, "This section could not be shown: " + error.message));
  }
}
restore();
