#pragma once
// Words of the field, of other trainers and their files: what each is called here.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::dsl {

struct Meaning {
  std::vector<std::string> here;  // fields, constructors (T.cosine) and commands (cairn eval)
  std::string says;               // a sentence
  std::string text() const;       // "optimizer.clip, cairn eval: The sentence."
};

/// Case, and whether parts are joined by - _ . or a space, makes no difference.
std::optional<Meaning> meaning_of(std::string_view word);

/// For a word that meaning_of() lacks: by its first parts, as "lora" in "lora_rank", or by the nearest word.
std::optional<Meaning> meaning_near(std::string_view word);

/// The form that known_words() has: in small letters, without those joints.
std::string joined_word(std::string_view word);

/// All words that meaning_of() takes.
std::vector<std::string> known_words();

/// The nearest of `names` by edit distance, or "" when none is near enough to be meant.
std::string nearest(std::string_view name, const std::vector<std::string>& names);

}  // namespace cairn::dsl
