/* The page of all messages: shows those that have every word that was typed. */
document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("filter");
  if (!box) return;
  const messages = [...document.querySelectorAll("p.message")].map((node) => [node, node.textContent.toLowerCase()]);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter((word) => word.length > 2);
    for (const [node, text] of messages) node.hidden = !words.every((word) => text.includes(word));
  });
});
