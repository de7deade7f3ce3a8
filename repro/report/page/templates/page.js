(function () {
  "use strict";
  var box = document.getElementById("filters"), count = document.getElementById("count");
  var toggle = document.getElementById("toggle");
  var fields = Array.prototype.slice.call(box.querySelectorAll("[data-filter]"));
  var claims = Array.prototype.slice.call(document.querySelectorAll("details.claim"));
  var texts = claims.map(function (claim) { return claim.textContent.toLowerCase(); });

  function field(name) {
    return fields.filter(function (one) { return one.dataset.filter === name; })[0];
  }
  function shown() {
    return claims.filter(function (claim) { return !claim.hidden; });
  }
  function apply() {
    var text = field("text").value.trim().toLowerCase();
    claims.forEach(function (claim, place) {
      claim.hidden = !fields.every(function (one) {
        if (one.dataset.filter === "text" || !one.value) return true;
        if (one.dataset.filter === "evidence") return claim.dataset.evidence.split(" ").indexOf(one.value) >= 0;
        return claim.dataset[one.dataset.filter] === one.value;
      }) || texts[place].indexOf(text) < 0;
    });
    document.querySelectorAll("section.group").forEach(function (group) {
      group.hidden = !group.querySelector("details.claim:not([hidden])");
    });
    count.textContent = shown().length + " of " + claims.length + " claims";
    document.querySelectorAll(".tile").forEach(function (tile) {
      tile.setAttribute("aria-pressed", String(field("verdict").value === tile.dataset.verdict));
    });
    label();
  }
  function label() {
    toggle.textContent = shown().some(function (claim) { return !claim.open; }) ? "open all" : "close all";
  }
  function choose(name, value) {
    field(name).value = field(name).value === value ? "" : value;
    apply();
  }
  /* A link leads to its target even where a filter or a fold hides it. */
  function follow() {
    var target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.hidden) reset();
    for (var fold = target; fold; fold = fold.parentElement) if (fold.tagName === "DETAILS") fold.open = true;
    target.scrollIntoView();
  }
  function reset() {
    fields.forEach(function (one) { one.value = ""; });
    apply();
  }

  box.hidden = false;
  box.addEventListener("input", apply);
  document.getElementById("reset").addEventListener("click", reset);
  toggle.addEventListener("click", function () {
    var open = toggle.textContent === "open all";
    shown().forEach(function (claim) { claim.open = open; });
    label();
  });
  claims.forEach(function (claim) { claim.addEventListener("toggle", label); });
  document.querySelectorAll(".tile").forEach(function (tile) {
    tile.addEventListener("click", function () { choose("verdict", tile.dataset.verdict); });
  });
  document.querySelectorAll("button[data-about]").forEach(function (button) {
    button.addEventListener("click", function () { choose("about", button.dataset.about); });
  });
  window.addEventListener("hashchange", follow);
  apply();
  follow();
})();
