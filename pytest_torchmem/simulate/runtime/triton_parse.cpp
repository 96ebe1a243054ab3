#include "triton_ir.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>

namespace simulated::triton_ir {
namespace {

[[noreturn]] void not_understood(const std::string& text) { throw std::runtime_error(text); }

Type scalar(Kind kind, int bits) {
  Type type;
  type.kind = kind;
  type.bits = bits;
  return type;
}

// A type at the start of a text, which is moved behind it; false if there is none.
bool take_type(const char*& at, Type& type) {
  const std::string text = at;
  const auto begins = [&](const char* start) { return text.rfind(start, 0) == 0; };
  if (begins("tensor<")) {
    at += 7;
    std::vector<int64_t> sizes;
    while (std::isdigit(*at)) {
      char* end = nullptr;
      sizes.push_back(std::strtoll(at, &end, 10));
      if (*end != 'x') return false;
      at = end + 1;
    }
    if (!take_type(at, type) || *at++ != '>') return false;
    type.sizes = sizes;
    return true;
  }
  if (begins("!tt.ptr<")) {
    at += 8;
    Type target;
    if (!take_type(at, target)) return false;
    while (*at && *at != '>') ++at;  // an address space
    ++at;
    type = scalar(Kind::kPointer, 64);
    type.target = std::make_shared<Type>(target);
    return true;
  }
  if (begins("bf16")) return at += 4, type = scalar(Kind::kBfloat, 16), true;
  if (begins("index")) return at += 5, type = scalar(Kind::kInteger, 64), true;
  if ((*at != 'i' && *at != 'f') || !std::isdigit(at[1])) return false;
  const Kind kind = *at == 'i' ? Kind::kInteger : Kind::kFloat;
  char* end = nullptr;
  const int bits = static_cast<int>(std::strtol(at + 1, &end, 10));
  if (std::isalnum(*end) || *end == '_' || (kind == Kind::kFloat && bits < 16)) return false;
  at = end;
  type = scalar(kind, bits);
  return true;
}

bool is_in_name(char letter) { return std::isalnum(letter) || std::strchr("_-$.", letter); }

// Names where values come from, at the end of lines and of arguments.
std::string without_places(const std::string& line) {
  std::string kept;
  for (size_t at = 0; at < line.size();) {
    if (line.compare(at, 5, " loc(")) {
      kept += line[at++];
      continue;
    }
    int depth = 0;
    bool quoted = false;
    for (at += 4; at < line.size(); ++at) {
      if (line[at] == '"') quoted = !quoted;
      if (quoted) continue;
      depth += line[at] == '(' ? 1 : line[at] == ')' ? -1 : 0;
      if (!depth) break;
    }
    ++at;
  }
  const size_t first = kept.find_first_not_of(' '), last = kept.find_last_not_of(' ');
  return first == std::string::npos ? "" : kept.substr(first, last - first + 1);
}

class Parser {
 public:
  explicit Parser(const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("#loc", 0) == 0) continue;
      if (const std::string kept = without_places(line); !kept.empty()) lines_.push_back(kept);
    }
  }

  Kernel parse() {
    while (line().rfind("tt.func public", 0)) ++at_;
    const std::string head = line();
    for (size_t at = head.find('%'); at != std::string::npos; at = head.find('%', at + 1)) {
      const size_t colon = head.find(": ", at);
      const char* text = head.c_str() + colon + 2;
      kernel_.body.arguments.push_back(place(head.substr(at, colon - at)));
      kernel_.parameters.emplace_back();
      if (!take_type(text, kernel_.parameters.back())) not_understood(head);
    }
    ++at_;
    parse_into(kernel_.body);
    kernel_.values = places_.size();
    return std::move(kernel_);
  }

 private:
  const std::string& line() const {
    if (at_ >= lines_.size()) not_understood("the end");
    return lines_[at_];
  }

  int place(const std::string& name) {
    return places_.emplace(name, static_cast<int>(places_.size())).first->second;
  }

  // `%x` and `%x#2`; of `%x:3` the three places.
  std::string name_at(const std::string& text, size_t& at) const {
    const size_t start = at++;
    while (at < text.size() && is_in_name(text[at])) ++at;
    if (at < text.size() && text[at] == '#') {
      while (++at < text.size() && std::isdigit(text[at])) {
      }
      const std::string name = text.substr(start, at - start);
      return name.substr(name.size() - 2) == "#0" ? name.substr(0, name.size() - 2) : name;
    }
    return text.substr(start, at - start);
  }

  // Operations up to the line that closes the region.
  void parse_into(Region& region) {
    for (; line()[0] != '}'; ++at_) {
      if (line()[0] == '^') {
        for (size_t at = line().find('%'); at < line().size(); at = line().find('%', at)) {
          region.arguments.push_back(place(name_at(line(), at)));
        }
        continue;
      }
      region.operations.push_back(operation());
    }
  }

  Operation operation() {
    Operation made;
    const std::string whole = line();
    size_t at = 0;
    if (whole[0] == '%') {
      const std::string name = name_at(whole, at);
      const int count = whole[at] == ':' ? std::atoi(whole.c_str() + at + 1) : 1;
      for (int number = 0; number < count; ++number) {
        made.made.push_back(place(number ? name + "#" + std::to_string(number) : name));
      }
      at = whole.find(" = ") + 3;
    }
    if (whole[at] == '"') ++at;
    size_t end = at;
    while (end < whole.size() && (std::isalnum(whole[end]) || whole[end] == '.' || whole[end] == '_')) ++end;
    made.name = whole.substr(at, end - at);
    made.text = whole.substr(end);
    if (made.name == "scf.while") not_understood(whole);
    while (made.text.back() == '{') {  // one region after the other
      made.regions.emplace_back();
      ++at_;
      parse_into(made.regions.back());
      const std::string closing = line();
      if (closing == "} else {") continue;
      made.text += closing;
      break;
    }
    read_values(made);
    read_types(made);
    for (const Type& type : made.types) {
      size_t count = 1;
      for (int64_t size : type.sizes) count *= size;
      if (&type == &made.types.back()) kernel_.elements += count;
    }
    return made;
  }

  void read_values(Operation& made) {
    for (size_t at = made.text.find('%'); at < made.text.size(); at = made.text.find('%', at)) {
      made.given.push_back(place(name_at(made.text, at)));
    }
  }

  // Types stand behind the last colon outside of braces: those before are of attributes.
  static void read_types(Operation& made) {
    int depth = 0;
    for (const char* at = made.text.c_str(); *at;) {
      if (*at == '{') ++depth;
      if (*at == '}') --depth;
      const bool starts = at > made.text.c_str() && (at[-1] == ' ' || at[-1] == '(');
      Type type;
      const char* next = at;
      if (depth <= 0 && starts && take_type(next, type)) {
        made.types.push_back(type);
        at = next;
      } else {
        ++at;
      }
    }
  }

  std::vector<std::string> lines_;
  size_t at_ = 0;
  std::map<std::string, int> places_;
  Kernel kernel_;
};

}  // namespace

Kernel parse(const std::string& text) { return Parser(text).parse(); }

}  // namespace simulated::triton_ir
