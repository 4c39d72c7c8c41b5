#include "dsl/words.h"

#include <doctest/doctest.h>

#include <set>

#include "dsl/dsl.h"

using namespace cairn::dsl;

TEST_SUITE("dsl/words") {
  TEST_CASE("every word leads to fields that have help, or to commands, and stands in one row only") {
    std::set<std::string> seen;
    for (const std::string& word : known_words()) {
      CAPTURE(word);
      CHECK(seen.insert(word).second);
      CHECK(joined_word(word) == word);
      const std::optional<Meaning> meaning = meaning_of(word);
      REQUIRE(meaning.has_value());
      CHECK(!meaning->here.empty());
      CHECK(meaning->says.ends_with("."));
      for (const std::string& name : meaning->here) {
        CAPTURE(name);
        CHECK((name.starts_with("cairn ") || help_text(name).ok()));
      }
    }
  }

  TEST_CASE("case and joints of a word make no difference") {
    for (const char* word : {"learning_rate", "Learning-Rate", "learning rate", "learning.rate", "learningrate"})
      CHECK(meaning_of(word).value().here.front() == "optimizer.peak_lr");
    CHECK_FALSE(meaning_of("").has_value());
    CHECK_FALSE(meaning_of("---").has_value());
    CHECK_FALSE(meaning_of(std::string(1 << 20, 'x')).has_value());
  }

  TEST_CASE("a word is also found by its first parts and when it is misspelt") {
    CHECK(meaning_near("--lora-rank").value().here.front() == "cairn init");
    CHECK(meaning_near("wandb_project_name").value().here.front() == "log.trackers");
    CHECK(meaning_near("lerning_rate").value().here.front() == "optimizer.peak_lr");
    for (const char* word : {"gradient", "average", "labels", "push", "rocm", "exit codes"}) CHECK(meaning_of(word));
    for (const char* word : {"", "-", "__", "zzzzzz", "zz-zz-zz"}) CHECK_FALSE(meaning_near(word).has_value());
  }

  TEST_CASE("an unknown field is looked for among the field's words, also when it is misspelt") {
    CHECK(help_text("max_grad_norm").error().message.find("here it is optimizer.clip: ") != std::string::npos);
    CHECK(help_text("max_grad_nrom").error().message.find("the nearest is optimizer.clip: ") != std::string::npos);
  }

  TEST_CASE("the nearest name is at most one slip in three letters away, and neighbours swapped are one slip") {
    const std::vector<std::string> names = {"train", "resume", "ckpt"};
    CHECK(nearest("trian", names) == "train");
    CHECK(nearest("resmue", names) == "resume");
    CHECK(nearest("ckp", names) == "ckpt");
    CHECK(nearest("zzzzz", names).empty());
    CHECK(nearest("", names).empty());
  }
}
