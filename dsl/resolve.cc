#include "dsl/resolve.h"

#include <fmt/format.h>

#include <algorithm>

#include "dsl/checks.h"
#include "runtime/plan/cluster_rules.h"

namespace cairn::dsl {
namespace {

std::string join_path(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

NodePtr text_node(const std::string& text) {
  Node out;
  out.kind = Node::Kind::kString;
  out.text = text;
  return std::make_shared<const Node>(std::move(out));
}

NodePtr ref_node(const std::string& path, const Place& place) {
  Node out;
  out.kind = Node::Kind::kRef;
  out.text = path;
  out.place = place;
  return std::make_shared<const Node>(std::move(out));
}

NodePtr times(NodePtr left, const Entry& right) {
  Node out;
  out.kind = Node::Kind::kOp;
  out.text = "mul";
  out.entries = {{"", std::move(left), right.place}, {"", right.value, right.place}};
  out.place = right.place;
  return std::make_shared<const Node>(std::move(out));
}

bool has_constructor(const Block& block, const std::string& name) {
  return std::find(block.constructors.begin(), block.constructors.end(), name) != block.constructors.end();
}

/// `base` with the entries of `over` put over it.
NodePtr merged(const Node& base, const std::vector<Entry>& over) {
  Node out = base;
  const auto is_weights = [](const Entry& e) { return e.key == "weights"; };
  // Weights are of the sources that were there, and those of a layer stay beside those of the next.
  if (std::any_of(over.begin(), over.end(), [](const Entry& e) { return e.key == "sources"; }))
    std::erase_if(out.entries, is_weights);
  for (Entry entry : over) {
    const Entry* weights = out.find("weights");
    if (is_weights(entry) && weights != nullptr && weights->value->is_table() && entry.value->is_table())
      entry.value = merged(*weights->value, entry.value->entries);
    const auto same = std::find_if(out.entries.begin(), out.entries.end(),
                                   [&](const Entry& e) { return !e.key.empty() && e.key == entry.key; });
    if (entry.value->kind == Node::Kind::kUnset) {
      if (same != out.entries.end()) out.entries.erase(same);
    } else if (same != out.entries.end()) {
      *same = entry;
    } else {
      out.entries.push_back(entry);
    }
  }
  return std::make_shared<const Node>(std::move(out));
}

/// Writes a field's canonical value into the struct that has the field.
void store_value(const Field& field, void* object, const Json& value);

void store_block(const Block& block, void* object, const Json& values) {
  for (const Field& field : block.fields) {
    if (field.stored()) store_value(field, object, values.at(field.key));
  }
}

void store_value(const Field& field, void* object, const Json& value) {
  if (field.member) {
    store_block(*field.block, field.member(object), value);
  } else if (field.element) {
    field.resize(object, static_cast<int64_t>(value.size()));
    for (size_t i = 0; i < value.size(); ++i)
      store_block(*field.block, field.element(object, static_cast<int64_t>(i)), value[i]);
  } else {
    field.store(object, value);
  }
}

}  // namespace

std::pair<std::string, int> Resolver::locate(const Place& place) {
  if (place.call == nullptr) return {"", 0};
  const Call& call = *place.call;
  if (call.line == 0 || place.path.empty()) return {call.file, call.line};
  auto map = maps_.find(call.file);
  if (map == maps_.end()) {
    const auto file = std::find_if(files_.begin(), files_.end(), [&](const auto& f) { return f.first == call.file; });
    if (file == files_.end()) return {call.file, call.line};
    map = maps_.emplace(call.file, TableMap(file->second)).first;
  }
  return {call.file, map->second.line_of(call.constructor, call.line, place.path)};
}

std::string Resolver::source_line(const std::string& file, int line) const {
  if (line == 0) return "";
  for (const auto& [name, text] : files_)
    if (name == file) return line_text(text, line);
  return "";
}

void Resolver::complain(const std::string& path, const Place& place, const Complaint& complaint) {
  Diagnostic out;
  std::tie(out.file, out.line) = locate(place);
  out.path = path;
  out.code = complaint.code;
  const bool joined = complaint.message[0] == ':' || complaint.message[0] == '[';
  out.message = path + (joined ? "" : " ") + complaint.message;
  out.suggest = complaint.suggest;
  out.accepted = complaint.accepted;
  out.source = source_line(out.file, out.line);
  // A field that several layers or elements carry is told once.
  const auto same = [&](const Diagnostic& d) {
    return d.file == out.file && d.line == out.line && d.message == out.message;
  };
  if (std::none_of(diagnostics_.begin(), diagnostics_.end(), same)) diagnostics_.push_back(std::move(out));
  reported_.insert(path);
}

void Resolver::complain_type(const std::string& path, const Place& place, const Field& field, const Node& value) {
  complain(path, place, {"wrong_type", fmt::format("must be {}, got {}", expected(field), describe(value)), "", ""});
}

void Resolver::unknown_field(const Block& block, const std::string& path, const Entry& entry) {
  std::string name = block.name;
  if (const auto known = blocks_.find(path); known != blocks_.end() && !known->second.first.empty())
    name = known->second.first;
  if (entry.key.empty()) {
    complain(path.empty() ? "recipe" : path, entry.place,
             {"unnamed_field",
              fmt::format(": {} stands without a name; {} takes fields: name = value", describe(*entry.value), name),
              "", ""});
    return;
  }
  std::vector<std::string> names;
  std::string list;
  for (const Field& field : block.fields) {
    names.push_back(field.name);
    list += (list.empty() ? "" : ", ") + field.name;
  }
  const std::string near = nearest(entry.key, names);
  std::string accepted = near.empty() ? list : "";
  if (near.empty()) {
    // Right name, wrong block?
    visit_fields(
        [&](const std::string& other, const Field& field) {
          if (field.name == entry.key && other != join_path(path, entry.key)) accepted = other;
        },
        root_);
    if (const bool elsewhere = accepted != list; &root_ == &recipe_block() && !elsewhere) {
      std::optional<Meaning> meaning = meaning_of(join_path(path, entry.key));
      if (!meaning) meaning = meaning_of(entry.key);
      if (meaning) accepted = meaning->text();
    }
    std::string launchers;
    for (const Block* other : cluster_blocks())
      if (&root_ != &recipe_block() && path.empty() && other->find(entry.key) != nullptr)
        launchers += (launchers.empty() ? "T." : ", T.") + other->name;
    if (!launchers.empty()) accepted = "a field of " + launchers;
    if (block.name == "vocab" && entry.key == "pad_to")
      accepted = "size alone: padding to a multiple of mesh.tp is added at run time and never stored";
  }
  complain(join_path(path, entry.key), entry.place,
           {"unknown_field", fmt::format(": no such field in {}", name), near, accepted});
  if (!near.empty()) reported_.insert(join_path(path, near));
}

void Resolver::clear(const std::string& path) {
  const auto below = [&](const std::string& key) { return key == path || key.rfind(path + ".", 0) == 0; };
  std::erase_if(settings_, [&](const auto& item) { return below(item.first); });
  std::erase_if(blocks_, [&](const auto& item) { return below(item.first); });
}

void Resolver::apply(const Layer& layer) {
  if (blocks_.find("") == blocks_.end()) blocks_[""] = {root_.name, layer.place};
  apply_entries(root_, "", layer.table->entries);
}

void Resolver::apply_entries(const Block& block, const std::string& path, const std::vector<Entry>& entries) {
  // Sugar that sets several fields goes first, so that `betas` and `beta2` in one table end with beta2.
  std::vector<const Entry*> order;
  for (const Entry& entry : entries) order.push_back(&entry);
  std::stable_partition(order.begin(), order.end(),
                        [](const Entry* entry) { return entry->key == "betas" || entry->key == "positions"; });
  for (const Entry* entry : order) {
    const Field* field = entry->key.empty() ? nullptr : block.find(entry->key);
    if (field == nullptr) {
      unknown_field(block, path, *entry);
    } else {
      apply_field(join_path(path, entry->key), *field, entry->value, entry->place);
    }
  }
}

/// T.hf "folder" as the T.init_from it stands for.
NodePtr Resolver::init_from_hf(const std::string& path, const Node& hf) {
  const Block& block = *find_constructor("hf");
  Node out = hf;
  out.text = "init_from";
  out.entries.clear();
  for (const Entry& entry : hf.entries) {
    const bool first = &entry == &hf.entries.front();
    if (first && entry.key.empty()) {
      out.entries.push_back({"path", entry.value, entry.place});
    } else if (block.find(entry.key) != nullptr) {
      out.entries.push_back(entry);
    } else {
      unknown_field(block, path, entry);
    }
  }
  if (out.find("path") == nullptr) {
    complain(path, hf.place, {"missing", ": T.hf must begin with the folder: T.hf \"path\"", "", ""});
  }
  Node yes;
  yes.kind = Node::Kind::kBool;
  yes.boolean = true;
  out.entries.push_back({"weights_only", std::make_shared<const Node>(std::move(yes)), hf.place});
  return std::make_shared<const Node>(std::move(out));
}

void Resolver::apply_field(const std::string& path, const Field& field, const NodePtr& value, const Place& place) {
  if (path == "init" && value->kind == Node::Kind::kCtor && value->text == "hf") {
    return apply_block(path, field, init_from_hf(path, *value), place);
  }
  if (value->kind == Node::Kind::kUnset) {
    clear(path);
    if (field.form == Form::kBetas) clear("optimizer.beta1"), clear("optimizer.beta2");
    return;
  }
  if (field.type == Type::kBlock && field.form == Form::kPlain) return apply_block(path, field, value, place);
  if (field.form == Form::kData) return apply_data(path, field, value, place);
  const std::string parent = path.substr(0, path.rfind('.'));
  if (field.form == Form::kPositions && value->kind == Node::Kind::kCtor && value->text == "rotary") {
    settings_[path] = {text_node("rotary"), place};
    const Block& rotary = *find_constructor("rotary");
    for (const Entry& entry : value->entries) {
      const Field* part = rotary.find(entry.key);
      if (part == nullptr) {
        unknown_field(rotary, path, entry);
        continue;
      }
      const std::string sets = join_path(parent, part->key);
      if (entry.key == "fraction") {
        if (convert(sets, *part, *entry.value, entry.place, Pass::kApply))
          settings_[sets] = {times(ref_node(join_path(parent, "head_dim"), entry.place), entry), entry.place};
      } else {
        apply_field(sets, *find_field(sets), entry.value, entry.place);
      }
    }
    return;
  }
  if (field.form == Form::kVocab && value->kind == Node::Kind::kCtor && value->text == "vocab") {
    const Block& vocab = *find_constructor("vocab");
    for (const Entry& entry : value->entries)
      if (entry.key != "size") unknown_field(vocab, path, entry);
    const Entry* size = value->find("size");
    if (size == nullptr) {
      complain(path, value->place, {"missing", ": T.vocab needs size", "", ""});
    } else {
      apply_field(path, field, size->value, size->place);
    }
    return;
  }
  if (field.form == Form::kBetas) {
    if (value->kind != Node::Kind::kTable || value->entries.size() != 2 || !value->entries[0].key.empty() ||
        !value->entries[1].key.empty())
      return complain_type(path, place, field, *value);
    for (int i = 0; i < 2; ++i) {
      const std::string beta = join_path(parent, fmt::format("beta{}", i + 1));
      apply_field(beta, *find_field(beta), value->entries[static_cast<size_t>(i)].value,
                  value->entries[static_cast<size_t>(i)].place);
    }
    return;
  }
  if (convert(path, field, *value, place, Pass::kApply)) settings_[path] = {value, place};
}

void Resolver::apply_block(const std::string& path, const Field& field, const NodePtr& value, const Place& place) {
  const Block& block = *field.block;
  const auto known = blocks_.find(path);
  if (value->kind == Node::Kind::kCtor && has_constructor(block, value->text)) {
    if (known != blocks_.end() && !known->second.first.empty() && known->second.first != value->text) clear(path);
    blocks_[path] = {value->text, value->place};
  } else if (value->kind == Node::Kind::kTable || value->kind == Node::Kind::kReplace) {
    std::string constructor = known != blocks_.end() ? known->second.first : "";
    if (constructor.empty() && block.constructors.size() > 1) return complain_type(path, place, field, *value);
    const Place begin = value->kind == Node::Kind::kReplace || known == blocks_.end() ? place : known->second.second;
    if (value->kind == Node::Kind::kReplace) clear(path);
    blocks_[path] = {constructor, begin};
  } else {
    return complain_type(path, place, field, *value);
  }
  apply_entries(block, path, value->entries);
}

void Resolver::apply_data(const std::string& path, const Field& field, const NodePtr& value, const Place& place) {
  NodePtr next = value;
  const auto known = settings_.find(path);
  const Node* base = known == settings_.end() ? nullptr : known->second.value.get();
  if (value->kind == Node::Kind::kTable && base != nullptr) {
    next = merged(*base, value->entries);
  } else if (value->kind == Node::Kind::kCtor && base != nullptr && base->text == value->text) {
    next = merged(*base, value->entries);
  } else if (value->kind == Node::Kind::kReplace && base != nullptr) {
    Node fresh = *base;
    fresh.entries = value->entries;
    fresh.place = value->place;
    next = std::make_shared<const Node>(std::move(fresh));
  }
  if (convert(path, field, *next, place, Pass::kApply)) settings_[path] = {next, place};
}

// --- values
// -----------------------------------------------------------------------------------------------------------

std::optional<Json> Resolver::fallback(const std::string& path, const Field& field) {
  const auto model = blocks_.find("model");
  const bool llama = model != blocks_.end() && model->second.first == "llama";
  if (field.required) {
    // A block that is missing as a whole is told as one thing, and so is a value that was given and refused.
    const std::string parent = path.find('.') == std::string::npos ? "" : path.substr(0, path.rfind('.'));
    if (reported_.count(path) == 0 && reported_.count(parent) == 0 && blocks_.count(parent) != 0) {
      Complaint missing{"missing", fmt::format("is missing; it must be {}", expected(field)), "", ""};
      complain(path, blocks_[parent].second, missing);
    }
    return std::nullopt;
  }
  if (!field.rule.empty()) return derived_default(path, llama, [this](const std::string& other) { return get(other); });
  if (field.form == Form::kTokenizer) return Json{{"kind", "none"}, {"path", ""}};
  if (field.from_constructor) {
    const auto written = blocks_.find(path.substr(0, path.rfind('.')));
    if (written != blocks_.end() && !written->second.first.empty()) return Json(written->second.first);
  }
  return llama && field.llama ? *field.llama : field.fallback;
}

std::optional<Json> Resolver::get(const std::string& path) {
  if (const auto known = resolved_.find(path); known != resolved_.end()) return known->second;
  const Field* field = find_field(path, root_);
  RT_CHECK(field != nullptr, "no field {}", path);
  const auto setting = settings_.find(path);
  if (std::find(resolving_.begin(), resolving_.end(), path) != resolving_.end()) {
    std::string chain;
    for (const std::string& step : resolving_) chain += step + " -> ";
    if (setting != settings_.end())
      complain(path, setting->second.place, {"cycle", ": T.ref goes in a circle: " + chain + path, "", ""});
    return std::nullopt;
  }
  resolving_.push_back(path);
  std::optional<Json> out;
  if (setting != settings_.end())
    out = convert(path, *field, *setting->second.value, setting->second.place, Pass::kFinal);
  if (!out && (setting == settings_.end() || !field->required)) out = fallback(path, *field);
  resolving_.pop_back();
  resolved_[path] = out;
  return out;
}

void Resolver::fill(const Block& block, const std::string& path, void* object) {
  for (const Field& field : block.fields) {
    if (!field.stored() || field.form == Form::kSegments) continue;  // stages: see resolve_stages
    const std::string at = join_path(path, field.name);
    if (field.member && field.form == Form::kPlain) {
      if (field.required && blocks_.count(at) == 0 && reported_.count(at) == 0)
        complain(at, blocks_[path].second,
                 {"missing", fmt::format("is missing; it must be {}", expected(field)), "", ""});
      fill(*field.block, at, field.member(object));
      continue;
    }
    const std::optional<Json> value = get(at);
    if (!value || value->is_null()) continue;
    store_value(field, object, *value);
  }
}

Place Resolver::place_of(const std::string& path) const {
  std::string at = path;
  if (const size_t element = at.find('['); element != std::string::npos) {
    // "optimizer.lr[2]": the stage's own call when it has one
    const auto list = settings_.find(at.substr(0, element));
    const auto index = static_cast<size_t>(std::atoi(at.c_str() + element + 1));
    if (list != settings_.end() && index >= 1) {
      const Node& value = *list->second.value;
      if (value.kind == Node::Kind::kCtor && value.text != "schedule") return value.place;
      if (index <= value.entries.size()) {
        const Entry& entry = value.entries[index - 1];
        return entry.value->kind == Node::Kind::kCtor ? entry.value->place : entry.place;
      }
    }
    at.resize(element);
  }
  while (true) {
    if (const auto setting = settings_.find(at); setting != settings_.end()) return setting->second.place;
    if (const auto block = blocks_.find(at); block != blocks_.end()) return block->second.second;
    const size_t dot = at.rfind('.');
    if (dot == std::string::npos) break;
    at.resize(dot);
  }
  const auto root = blocks_.find("");
  return root == blocks_.end() ? Place{} : root->second.second;
}

Recipe Resolver::resolve(int64_t world, const std::function<Result<int64_t>(const Recipe&)>& epoch_samples) {
  if (epoch_samples) {
    const auto counted = std::make_shared<std::optional<Result<int64_t>>>();
    epoch_samples_ = [this, counted, epoch_samples]() -> Result<int64_t> {
      if (!*counted) {
        Recipe read;
        const std::pair<std::string, void*> needed[] = {
            {"data", &read}, {"model.vocab", &read.model}, {"model.context", &read.model}};
        for (const auto& [path, object] : needed) {
          const std::optional<Json> value = get(path);
          if (!value || value->is_null())
            return Error{ErrorCode::kInvalidInput, path + " is not known, so samples cannot be counted"};
          store_value(*find_field(path, root_), object, *value);
        }
        *counted = epoch_samples(read);
      }
      return **counted;
    };
  }
  Recipe out;
  fill(recipe_block(), "", &out);
  check(out, world, RunPast{});
  resolve_stages(out, world);
  return out;
}

ClusterConfig Resolver::resolve_cluster(Launcher launcher) {
  ClusterConfig out{.launcher = launcher};
  fill(root_, "", &out);
  if (launcher == Launcher::kHosts) out.hosts = std::max<int64_t>(0, std::ssize(out.ssh.names) - out.spares);
  report(find_mistakes(out, notes()));
  if (out.hosts_min == 0) out.hosts_min = out.hosts;
  return out;
}

void Resolver::check(const Recipe& recipe, int64_t world, const std::optional<RunPast>& past) {
  report(segment_mistakes(recipe, world, past, notes()));
}

/// A required value that is missing keeps the struct's 0, and nothing is said about it again.
FieldNotes Resolver::notes() {
  return FieldNotes{.known =
                        [&](const std::string& path) {
                          const auto value = resolved_.find(path);
                          return value != resolved_.end() && value->second.has_value() && !value->second->is_null();
                        },
                    .is_set = [&](const std::string& path) { return settings_.count(path) != 0; },
                    .where = [&](const std::string& from, const std::string& path) -> std::string {
                      if (settings_.count(path) == 0) return "";
                      const auto here = locate(place_of(from)), there = locate(place_of(path));
                      if (here == there || there.first.empty()) return "";
                      return there.second == 0 ? fmt::format(" ({})", there.first)
                                               : fmt::format(" ({}:{})", there.first, there.second);
                    }};
}

void Resolver::report(std::vector<Mistake> mistakes) {
  for (Mistake& mistake : mistakes) {
    Diagnostic diagnostic = to_diagnostic(std::move(mistake));
    std::tie(diagnostic.file, diagnostic.line) = locate(place_of(diagnostic.path));
    diagnostic.source = source_line(diagnostic.file, diagnostic.line);
    diagnostics_.push_back(std::move(diagnostic));
  }
}

std::vector<Origin> Resolver::origins() {
  std::vector<Origin> out;
  visit_fields([&](const std::string& path, const Field& field) {
    if (field.type == Type::kBlock && field.form == Form::kPlain) return;
    if (!field.stored()) return;
    const std::optional<Json> value = get(path);
    Origin origin;
    origin.path = path;
    origin.value = value ? lua_text(field, *value) : "nil";
    const auto setting = settings_.find(path);
    if (setting == settings_.end()) {
      origin.set_by = field.rule.empty() ? "default" : "derived";
      out.push_back(std::move(origin));
      return;
    }
    origin.set_by = setting->second.place.call->layer;
    std::tie(origin.file, origin.line) = locate(setting->second.place);
    out.push_back(origin);
    if (field.form == Form::kSegments) out.insert(out.end(), stage_origins_.begin(), stage_origins_.end());
    if (field.form != Form::kStages || !value) return;
    for (size_t i = 0; i < value->size(); ++i) {
      Origin stage = origin;
      stage.path = fmt::format("{}[{}]", path, i + 1);
      const std::string list = lua_text(field, Json::array({(*value)[i]}));
      stage.value = list.substr(13, list.size() - 15);  // without "T.schedule { " and " }"
      std::tie(stage.file, stage.line) = locate(place_of(stage.path));
      out.push_back(std::move(stage));
    }
  });
  return out;
}

}  // namespace cairn::dsl
